import unittest

from text.slug import first


class TestMore(unittest.TestCase):
    def test_one(self):
        self.assertEqual(first("alone"), "alone")

    def test_empty(self):
        """A slug that starts with the separator."""
        self.assertEqual(first("-b"), "")
