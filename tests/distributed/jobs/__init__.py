"""Jobs of the tests: functions that run on every rank. There is one module for each test module."""
