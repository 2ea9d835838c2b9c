import unittest

from shop.stock import total

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(total([2, 5]), 7)
