"""A small Django project in a directory of its own, driven by its own command line as users drive theirs."""

import subprocess
import sys

from sqlalchemy import make_url

from support.processes import environment

SETTINGS = """
import django

SECRET_KEY = "of a test"
USE_TZ = True
TIME_ZONE = "Asia/Kolkata"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "sqla_neoq.contrib.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {{
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        }},
    }}
]
ROOT_URLCONF = "urls"
ALLOWED_HOSTS = ["testserver"]
DATABASES = {{
    "default": {{
        "ENGINE": "django.db.backends.postgresql",
        **{database!r},
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {{"application_name": "shop"}},
    }},
    "small": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    "role": {{
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "a/b",
        "USER": "me@x",
        "PASSWORD": "p:w/d",
        "HOST": "/run/pg",
        "PORT": 6543,
        "OPTIONS": {{"sslmode": "disable", "assume_role": "a b", "server_side_binding": True}},
    }},
}}
if django.VERSION >= (6,):
    TASKS = {{
        "default": {{
            "BACKEND": "sqla_neoq.contrib.django.NeoqBackend",
            "QUEUES": ["default", "mails, and: more"],
            "OPTIONS": {{"max_retries": 0}},
        }}
    }}
"""
URLS = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""


class Project:
    """The project, with one application ``shop`` whose module ``tasks`` the test writes."""

    def __init__(self, directory, url, tasks):
        self.directory = directory
        (directory / "shop").mkdir(parents=True)
        (directory / "shop" / "__init__.py").touch()
        (directory / "shop" / "tasks.py").write_text(tasks)
        (directory / "settings.py").write_text(SETTINGS.format(database=_database(make_url(url))))
        (directory / "urls.py").write_text(URLS)

    @property
    def environment(self):
        return {"DJANGO_SETTINGS_MODULE": "settings"}

    def manage(self, *arguments, code=0):
        """Run ``manage.py``; return what it wrote."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "django", *arguments],
            cwd=self.directory,
            env=environment(self.environment),
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def python(self, script):
        """Run a script with Django set up; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"import django\ndjango.setup()\n{script}"],
            cwd=self.directory,
            env=environment(self.environment),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()


def _database(url):
    host, port = url.host or url.query.get("host", ""), url.port or url.query.get("port", "")
    return {
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": host,
        "PORT": str(port),
    }
