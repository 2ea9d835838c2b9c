import unittest

from double import double


class TestDouble(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(21), 42)
