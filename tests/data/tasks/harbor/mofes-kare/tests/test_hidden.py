import unittest

from mofes.palas import kona
from mofes.kamak import tirun

class TestHidden(unittest.TestCase):
    def test_a(self):
        self.assertEqual(kona([9, 3, 1, 4, 4], 1), [[9]])

    def test_b(self):
        self.assertEqual(kona([], 3), [[]])

    def test_c(self):
        self.assertEqual(kona([], 1), [[]])

    def test_d(self):
        self.assertEqual(tirun([9, 3, 1, 4, 4], 1), [9])

    def test_e(self):
        self.assertEqual(tirun([], 3), [])

    def test_f(self):
        self.assertEqual(tirun([], 1), [])
