"""The errors a user meets: each is one line that says what, why and what to do."""


class NotCovered(RuntimeError):
    """Something that was asked for is outside the contract, so the engine refuses to start.

    It is no ``ValueError`` on purpose: pydantic would wrap that into a report of many lines.
    """

    def __init__(self, what: str, why: str, what_to_do: str) -> None:
        super().__init__(f"batch-invariant mode does not cover {what}: {why}; {what_to_do}.")


class BadSetting(RuntimeError):
    """An environment variable of this project has a wrong name or value."""
