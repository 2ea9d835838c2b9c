import unittest

from month import month


class TestMonth(unittest.TestCase):
    def test_month(self):
        self.assertEqual(month(2), "February")
