import unittest

from minutes import minutes


class TestMinutes(unittest.TestCase):
    def test_minutes(self):
        self.assertEqual(minutes(2), 120)
