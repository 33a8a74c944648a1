"""With FastAPI and an AsyncSession: ``uvicorn --factory signup.fastapi_app:create_app``.

``create_app_with_runner`` also runs the jobs, in threads of the web server's process.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from signup import tasks
from signup.models import User
from sqla_neoq import Runner, RunnerConfig


class NewUser(BaseModel):
    """The body of a sign-up."""

    email: str


def create_app(*, with_runner: bool = False) -> FastAPI:
    """Make the application, on the database in ``DATABASE_URL``."""
    url = os.environ["DATABASE_URL"]
    engine = create_async_engine(url)
    sessions = async_sessionmaker(engine)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        # The runner has a synchronous engine of its own. To start and to stop it waits for the database and for jobs:
        # a thread does that, so the event loop need not.
        runner = Runner(url, tasks, config=RunnerConfig(concurrency=4)) if with_runner else None
        if runner is not None:
            await asyncio.to_thread(runner.start)
        try:
            yield
        finally:
            if runner is not None:
                await asyncio.to_thread(runner.stop)
            await engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/users", status_code=201)
    async def sign_up(new: NewUser) -> dict[str, int]:
        # Not in a dependency with yield: that would commit when the answer has been sent already.
        try:
            async with sessions.begin() as session:
                user = User(email=new.email)
                session.add(user)
                await session.flush()  # the database gives the user an id
                await tasks.welcome.enqueue_async(session, user_id=user.id)
                return {"id": user.id}
        except IntegrityError:
            raise HTTPException(409, "this address has signed up before") from None

    @app.get("/users/{user_id}")
    async def show(user_id: int) -> dict[str, object]:
        async with sessions() as session:
            user = await session.get(User, user_id)
        if user is None:
            raise HTTPException(404)
        return {"email": user.email, "welcomed": user.welcomed}

    return app


def create_app_with_runner() -> FastAPI:
    """Make the application that needs no worker process."""
    return create_app(with_runner=True)
