import unittest

from nenum.perum import katit
from nenum.geper import dita

class TestVisible(unittest.TestCase):
    def test_a(self):
        self.assertEqual(katit([5]), {"zopon": [15]})

    def test_b(self):
        self.assertEqual(dita([]), {"lusal": []})
