"""gpt-oss: attention with learned sinks over a mixture of stacked, biased experts."""
