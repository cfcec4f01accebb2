"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with a status code."""

from typing import NoReturn

from pydantic_core import ErrorDetails

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An error response. param: the request field that is wrong."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = KINDS.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def refuse(message: str, param: str | None = None, code: str | None = None) -> NoReturn:
    """Raise the 400 error of an invalid request."""
    raise ApiError(400, message, param, code)


def invalid_body(details: ErrorDetails) -> ApiError:
    """Error for an invalid body, from pydantic's first validation error."""
    if details["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {details['msg']}", code="invalid_json")
    name = next((str(part) for part in details["loc"]), None)
    if details["type"] == "extra_forbidden":
        message = f"{name}: no such field here; leave it out"
        return ApiError(400, message, name, "unknown_parameter")
    if details["type"] == "missing":
        return ApiError(400, f"{name} is missing", name, "missing_required_parameter")
    message = details["msg"].removeprefix("Value error, ")
    where = f"{name}: " if name else ""
    return ApiError(400, f"{where}{message[:1].lower()}{message[1:]}", name, "invalid_value")
