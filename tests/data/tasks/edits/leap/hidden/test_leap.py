import unittest

from leap import leap


class TestLeap(unittest.TestCase):
    def test_leap(self):
        self.assertEqual(leap(2024), True)
