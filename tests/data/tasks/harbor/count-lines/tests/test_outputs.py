import pathlib
import unittest


class TestOutputs(unittest.TestCase):
    def test_lines(self):
        self.assertEqual(pathlib.Path("/app/lines.txt").read_text().strip(), "3")
