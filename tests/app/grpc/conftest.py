"""What tests of the gRPC side share with those of the HTTP side."""

from tests.app.openai.conftest import app_over, model_config, tokenizer

__all__ = ["app_over", "model_config", "tokenizer"]
