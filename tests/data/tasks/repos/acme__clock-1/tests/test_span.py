import unittest

from clock.span import minutes


class TestSpan(unittest.TestCase):
    def test_short(self):
        self.assertEqual(minutes("0:05"), 5)
