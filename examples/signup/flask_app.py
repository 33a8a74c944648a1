"""With Flask and Flask-SQLAlchemy: ``flask --app signup.flask_app run``."""

import os

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import IntegrityError

from signup.models import User
from signup.tasks import welcome

db = SQLAlchemy()


def create_app() -> Flask:
    """Make the application, on the database in ``DATABASE_URL``."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    db.init_app(app)

    @app.post("/users")
    def sign_up() -> tuple[dict[str, object], int]:
        user = User(email=request.get_json()["email"])
        db.session.add(user)
        try:
            db.session.flush()  # the database gives the user an id
        except IntegrityError:
            db.session.rollback()
            return {"error": "this address has signed up before"}, 409
        welcome.enqueue(db.session, user_id=user.id)
        db.session.commit()  # the user and the job, or neither
        return {"id": user.id}, 201

    @app.get("/users/<int:user_id>")
    def show(user_id: int) -> dict[str, object]:
        user = db.get_or_404(User, user_id)
        return {"email": user.email, "welcomed": user.welcomed}

    return app
