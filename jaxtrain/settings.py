"""What every part of the configuration shares, and the error that the user can fix."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all configuration sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class UserError(Exception):
    """Something that the user can put right: `main` prints it as one line and exits with code 2.

    The message says what was wrong, where, and what would be right.
    """
