"""Tortoise insists on a module with a model."""

from tortoise import Model, fields


class Order(Model):
    customer = fields.TextField()
