"""Low-rank adapters (LoRA): several fine-tunings of one model, chosen by each request."""
