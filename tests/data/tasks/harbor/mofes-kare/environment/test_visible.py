import unittest

from mofes.palas import kona
from mofes.kamak import tirun

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(kona([9, 3, 1, 4, 4], 1), [[9]])

    def test_b(self):
        self.assertEqual(tirun([], 3), [])
