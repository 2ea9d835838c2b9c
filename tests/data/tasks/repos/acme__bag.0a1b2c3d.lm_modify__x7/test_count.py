import unittest

from bag.count import most


class TestCount(unittest.TestCase):
    def test_most(self):
        self.assertEqual(most(["a", "b", "b"]), "b")

    def test_first(self):
        self.assertEqual(most(["c", "d"]), "c")

    def test_none(self):
        self.assertEqual(most([]), "")
