"""Integrations: each imports its framework, and nothing else of this library imports them."""
