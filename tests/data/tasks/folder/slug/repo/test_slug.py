import unittest

from text.slug import first


class TestSlug(unittest.TestCase):
    def test_first(self):
        self.assertEqual(first("a-b"), "a")
