"""SmolLM2-135M-Instruct decoding text with its keys and values in a paged cache of `cupaged`."""
