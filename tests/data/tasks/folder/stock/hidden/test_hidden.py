import unittest

from shop.order import report
from shop.stock import total


class TestHidden(unittest.TestCase):
    def test_none(self):
        self.assertEqual(total([]), 0)

    def test_some(self):
        self.assertEqual(total([1, 2, 3]), 6)

    def test_report(self):
        self.assertEqual(report([4, 4]), {"items": 8})
