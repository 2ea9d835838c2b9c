import unittest

from game.dice import score


class TestDice(unittest.TestCase):
    def test_none(self):
        self.assertEqual(score([]), 0)
