"""Version 1 of the tables."""

from __future__ import annotations

from django.db import migrations, models

from sqla_neoq.migrations import statements

# As the numbered steps refuse it too.
KEEP_JOBS = """
DO $$ BEGIN
  LOCK TABLE neoq_jobs IN ACCESS EXCLUSIVE MODE;
  IF EXISTS (SELECT FROM neoq_jobs WHERE status IN ('new', 'failed', 'running')) THEN
    RAISE EXCEPTION 'removing the tables would lose unfinished jobs'
      USING HINT = 'Let the workers finish them, or delete them, first.';
  END IF;
END $$
"""


class Migration(migrations.Migration):
    """Creates the tables, and removes them if no job would be lost. Its models are unmanaged: they create nothing."""

    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.RunSQL(list(statements(0, 1)), [KEEP_JOBS, *statements(1, 0)]),
        migrations.CreateModel(
            name="DeadJob",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("queue", models.TextField()),
                ("task", models.TextField(null=True)),
                ("priority", models.SmallIntegerField()),
                ("payload", models.JSONField()),
                ("fingerprint", models.TextField(null=True)),
                ("run_after", models.DateTimeField()),
                ("deadline", models.DateTimeField(null=True)),
                ("retries", models.IntegerField()),
                ("max_retries", models.IntegerField(null=True)),
                ("crashes", models.SmallIntegerField()),
                ("created_at", models.DateTimeField()),
                ("ran_at", models.DateTimeField(null=True)),
                ("died_at", models.DateTimeField()),
                (
                    "reason",
                    models.TextField(
                        choices=[
                            ("exhausted", "exhausted"),
                            ("discarded", "discarded"),
                            ("deadline", "deadline"),
                            ("crashed", "crashed"),
                        ]
                    ),
                ),
                ("worker_id", models.BigIntegerField(null=True)),
                ("error", models.TextField(null=True)),
            ],
            options={
                "db_table": "neoq_dead_jobs",
                "ordering": ["-id"],
                "managed": False,
            },
        ),
        migrations.CreateModel(
            name="Failure",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("job_id", models.BigIntegerField()),
                ("attempt", models.IntegerField()),
                ("worker_id", models.BigIntegerField(null=True)),
                ("started_at", models.DateTimeField(null=True)),
                ("failed_at", models.DateTimeField()),
                ("kind", models.TextField()),
                ("message", models.TextField()),
                ("traceback", models.TextField(null=True)),
            ],
            options={
                "db_table": "neoq_failures",
                "ordering": ["-id"],
                "managed": False,
            },
        ),
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("queue", models.TextField()),
                ("task", models.TextField(null=True)),
                (
                    "status",
                    models.TextField(
                        choices=[
                            ("new", "new"),
                            ("running", "running"),
                            ("processed", "processed"),
                            ("failed", "failed"),
                            ("cancelled", "cancelled"),
                        ]
                    ),
                ),
                ("priority", models.SmallIntegerField()),
                ("payload", models.JSONField()),
                ("fingerprint", models.TextField(null=True)),
                ("run_after", models.DateTimeField()),
                ("deadline", models.DateTimeField(null=True)),
                ("retries", models.IntegerField()),
                ("max_retries", models.IntegerField(null=True)),
                ("crashes", models.SmallIntegerField()),
                ("created_at", models.DateTimeField()),
                ("ran_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("cancel_requested_at", models.DateTimeField(null=True)),
                ("worker_id", models.BigIntegerField(null=True)),
                ("claim_token", models.BigIntegerField(null=True)),
                ("error", models.TextField(null=True)),
            ],
            options={
                "db_table": "neoq_jobs",
                "ordering": ["-id"],
                "managed": False,
            },
        ),
    ]
