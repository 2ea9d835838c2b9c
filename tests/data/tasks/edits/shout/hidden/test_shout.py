import unittest

from shout import shout


class TestShout(unittest.TestCase):
    def test_shout(self):
        self.assertEqual(shout("no"), "NO")
