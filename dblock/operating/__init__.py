"""What operators see and do: the inspector in Django's admin, the timeline, the wording of both, and the commands."""
