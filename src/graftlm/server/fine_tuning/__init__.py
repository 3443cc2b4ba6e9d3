"""Fine-tuning jobs over HTTP, as OpenAI's API has them, in front of the trainer that `graft train` uses."""
