"""The parts of the prefill/decode example that are the application's, not the library's."""
