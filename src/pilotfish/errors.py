"""The kinds of failure a person can meet."""


class PilotfishError(Exception):
    """Something went wrong that the input did not cause; the command line exits with 1."""


class InputError(PilotfishError):
    """A file, flag, prompt or request is wrong: one line that says what, and what would be right.

    The command line exits with 2, a server answers 4xx.
    """


class RequestError(PilotfishError):
    """One request can not go on, for what it asked of its tokens; the engine ends it and goes on with the others."""
