"""Tests. A package, so that no other one of that name can stand in front of it."""
