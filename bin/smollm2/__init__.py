"""SmolLM2-135M-Instruct, the real model that figures and tests are made with: download and conversion."""
