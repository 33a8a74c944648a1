"""The work in the background: ``python -m sqla_neoq.run signup.tasks``, the same for every framework in front."""

from signup.models import User
from sqla_neoq import current_job, task


@task(queue="letters")
def welcome(user_id: int) -> None:
    """Welcome a new user. What it writes commits together with the job's completion."""
    user = current_job().session.get_one(User, user_id)
    user.welcomed = True
