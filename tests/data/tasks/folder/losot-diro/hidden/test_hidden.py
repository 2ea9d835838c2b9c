import unittest

from losot.sutut import geti
from losot.zasom import natuk

class TestHidden(unittest.TestCase):
    def test_a(self):
        self.assertEqual(geti(2, 4), [(0, 2)])

    def test_b(self):
        self.assertEqual(geti(3, 3), [(1, 0)])

    def test_c(self):
        self.assertEqual(natuk(2, 4), [(0, 2)])

    def test_d(self):
        self.assertEqual(natuk(3, 3), [(1, 0)])
