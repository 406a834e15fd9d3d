"""The real models that figures and tests are made with: their download, and their conversion from GGUF."""
