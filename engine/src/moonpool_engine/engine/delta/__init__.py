"""Linear attention by the gated delta rule (Gated DeltaNet): its layers, states and reference."""
