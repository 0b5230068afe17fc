"""The processes that read bodies: their limits, and the head's end of them."""
