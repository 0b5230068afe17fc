"""What structured answers are asked for, where the client takes types of pydantic."""

from enum import Enum

from pydantic import BaseModel


class Name(Enum):
    PARIS = "Paris"
    ROME = "Rome"


class City(BaseModel):
    """A city."""

    name: Name
