"""The tables as Django sees them, for queries and the admin. Django changes nothing in them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Job(models.Model):
    """A job that has not died."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.TextField()
    task = models.TextField(null=True)
    status = models.TextField(
        choices=[(status, status) for status in ("new", "running", "processed", "failed", "cancelled")]
    )
    priority = models.SmallIntegerField()
    payload = models.JSONField()
    fingerprint = models.TextField(null=True)
    run_after = models.DateTimeField()
    deadline = models.DateTimeField(null=True)
    retries = models.IntegerField()
    max_retries = models.IntegerField(null=True)
    crashes = models.SmallIntegerField()
    created_at = models.DateTimeField()
    ran_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    cancel_requested_at = models.DateTimeField(null=True)
    worker_id = models.BigIntegerField(null=True)
    claim_token = models.BigIntegerField(null=True)
    error = models.TextField(null=True)

    class Meta:
        """Where it is."""

        managed = False
        db_table = "neoq_jobs"
        ordering: ClassVar = ["-id"]

    def __str__(self) -> str:
        return f"{self.id} {self.task or self.queue}"


class DeadJob(models.Model):
    """A job that will not be tried again."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.TextField()
    task = models.TextField(null=True)
    priority = models.SmallIntegerField()
    payload = models.JSONField()
    fingerprint = models.TextField(null=True)
    run_after = models.DateTimeField()
    deadline = models.DateTimeField(null=True)
    retries = models.IntegerField()
    max_retries = models.IntegerField(null=True)
    crashes = models.SmallIntegerField()
    created_at = models.DateTimeField()
    ran_at = models.DateTimeField(null=True)
    died_at = models.DateTimeField()
    reason = models.TextField(
        choices=[(reason, reason) for reason in ("exhausted", "discarded", "deadline", "crashed")]
    )
    worker_id = models.BigIntegerField(null=True)
    error = models.TextField(null=True)

    class Meta:
        """Where it is."""

        managed = False
        db_table = "neoq_dead_jobs"
        ordering: ClassVar = ["-id"]

    def __str__(self) -> str:
        return f"{self.id} {self.task or self.queue}"


class Failure(models.Model):
    """A failed attempt."""

    id = models.BigIntegerField(primary_key=True)
    job_id = models.BigIntegerField()
    attempt = models.IntegerField()
    worker_id = models.BigIntegerField(null=True)
    started_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField()
    kind = models.TextField()
    message = models.TextField()
    traceback = models.TextField(null=True)

    class Meta:
        """Where it is."""

        managed = False
        db_table = "neoq_failures"
        ordering: ClassVar = ["-id"]

    def __str__(self) -> str:
        return f"attempt {self.attempt} of job {self.job_id}"
