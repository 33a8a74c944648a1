"""With Litestar and the session of advanced-alchemy: ``litestar --app signup.litestar_app:create_app run``."""

import os
from dataclasses import dataclass

from advanced_alchemy.extensions.litestar import AsyncSessionConfig, SQLAlchemyAsyncConfig, SQLAlchemyPlugin
from litestar import Litestar, get, post
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException, NotFoundException
from litestar.params import FromPath, JSONBody
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from signup.models import User
from signup.tasks import welcome


@dataclass
class NewUser:
    """The body of a sign-up."""

    email: str


@post("/users")
async def sign_up(data: JSONBody[NewUser], db_session: NamedDependency[AsyncSession]) -> dict[str, int]:
    """Add the user and the job that welcomes them."""
    user = User(email=data.email)
    db_session.add(user)
    try:
        await db_session.flush()  # the database gives the user an id
    except IntegrityError:
        raise HTTPException("this address has signed up before", status_code=409) from None
    await welcome.enqueue_async(db_session, user_id=user.id)
    # The user and the job, or neither. Not left to the plugin's "autocommit", which answers 201 when its commit fails.
    await db_session.commit()
    return {"id": user.id}


@get("/users/{user_id:int}")
async def show(user_id: FromPath[int], db_session: NamedDependency[AsyncSession]) -> dict[str, object]:
    """Return a user."""
    user = await db_session.get(User, user_id)
    if user is None:
        raise NotFoundException
    return {"email": user.email, "welcomed": user.welcomed}


def create_app() -> Litestar:
    """Make the application, on the database in ``DATABASE_URL``."""
    database = SQLAlchemyAsyncConfig(
        connection_string=os.environ["DATABASE_URL"], session_config=AsyncSessionConfig(expire_on_commit=False)
    )
    return Litestar([sign_up, show], plugins=[SQLAlchemyPlugin(database)])
