import unittest

from price import price


class TestPrice(unittest.TestCase):
    def test_price(self):
        self.assertEqual(price(), 119)
