"""The command `plan`: what a model and its drafter will take, and what speculation will bring, from configurations."""

from pilotfish.plan.command import plan

__all__ = ["plan"]
