"""Programs (agents): their calls, their pauses, and which whole programs wait."""
