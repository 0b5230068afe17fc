"""The structured answers that are requested, for clients that take types of pydantic."""

from enum import Enum

from pydantic import BaseModel


class Name(Enum):
    PARIS = "Paris"
    ROME = "Rome"


class City(BaseModel):
    """A city."""

    name: Name
