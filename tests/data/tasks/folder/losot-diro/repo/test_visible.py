import unittest

from losot.sutut import geti
from losot.zasom import natuk

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(geti(2, 4), [(0, 2)])

    def test_b(self):
        self.assertEqual(natuk(3, 3), [(1, 0)])
