"""Sign up users behind Flask, FastAPI or Litestar, and welcome each in a background job."""
