//! Aligned tables. The width of coloured text is measured without the colour codes.

use super::format::{clean, width};
use crate::terminal::{Paint, Terminal};

/// Blanks between two columns.
const GAP: usize = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    paint: Paint,
}

impl Cell {
    /// Text from outside. Characters that could steer the terminal are removed.
    pub fn new(text: impl AsRef<str>) -> Self {
        Self {
            text: clean(text.as_ref()),
            paint: Paint::None,
        }
    }

    pub fn paint(mut self, paint: Paint) -> Self {
        self.paint = paint;
        self
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A heading that begins with `>` heads a column of numbers.
    pub fn new(headings: &[&str]) -> Self {
        let column = |heading: &&str| match heading.strip_prefix('>') {
            Some(heading) => (heading.to_owned(), Align::Right),
            None => ((*heading).to_owned(), Align::Left),
        };
        Self {
            columns: headings.iter().map(column).collect(),
            rows: Vec::new(),
        }
    }

    /// Cells beyond the headings are dropped, missing ones are empty.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Takes out columns, the last named one first, until each line has at most `width_max` columns. Returns the headings of
    /// what was taken out, in the order of the table.
    pub fn narrow(&mut self, width_max: usize, expendable: &[&str]) -> Vec<String> {
        let order: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let mut taken = Vec::new();
        for name in expendable.iter().rev() {
            if self.width() <= width_max {
                break;
            }
            let Some(at) = self.columns.iter().position(|(heading, _)| heading == name) else {
                continue;
            };
            taken.push(self.columns.remove(at).0);
            for row in self.rows.iter_mut().filter(|row| at < row.len()) {
                row.remove(at);
            }
        }
        order.into_iter().filter(|name| taken.contains(name)).collect()
    }

    /// Columns of the longest possible line.
    fn width(&self) -> usize {
        let gaps = GAP * self.columns.len().saturating_sub(1);
        (0..self.columns.len()).map(|at| self.width_of(at)).sum::<usize>() + gaps
    }

    fn width_of(&self, column: usize) -> usize {
        let heading = self.columns.get(column).map_or(0, |(name, _)| width(name));
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| width(&cell.text)).fold(heading, usize::max)
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Every line ends with a newline and has no blanks before it.
    pub fn render(&self, terminal: Terminal) -> String {
        let headings: Vec<Cell> = self
            .columns
            .iter()
            .map(|(name, _)| Cell::new(name).paint(Paint::Dim))
            .collect();
        let lines: Vec<&[Cell]> = std::iter::once(headings.as_slice())
            .chain(self.rows.iter().map(Vec::as_slice))
            .collect();
        let widths: Vec<usize> = (0..self.columns.len()).map(|at| self.width_of(at)).collect();
        let mut text = String::new();
        for line in lines {
            // Blanks are written only before more text, so no line ends with them.
            let mut blanks = 0;
            for (at, (_, align)) in self.columns.iter().enumerate() {
                let cell = line.get(at).cloned().unwrap_or_default();
                let room = widths[at] - width(&cell.text);
                if *align == Align::Right || cell.text.is_empty() {
                    blanks += room;
                }
                if !cell.text.is_empty() {
                    text.push_str(&" ".repeat(std::mem::take(&mut blanks)));
                    text.push_str(&terminal.paint(&cell.text, cell.paint));
                    blanks = if *align == Align::Left { room } else { 0 };
                }
                blanks += GAP;
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_whatever_is_painted_or_missing() {
        let mut table = Table::new(&["name", ">ms", "words"]);
        table.row(vec!["a".into(), Cell::new("1.0").paint(Paint::Bad), "x".into()]);
        table.row(vec!["longer".into(), "100.0".into()]);
        table.row(vec!["".into(), "2.0".into(), "evil\x1b[2J".into(), "too many".into()]);
        assert_eq!(
            table.render(Terminal::plain()),
            "name       ms  words\na         1.0  x\nlonger  100.0\n          2.0  evil?[2J\n"
        );
        let coloured = table.render(Terminal::coloured());
        assert!(coloured.contains("\x1b[31m1.0\x1b[0m"), "{coloured}");
        assert!(!coloured.contains("\x1b[2J"));
    }

    #[test]
    fn a_table_becomes_narrower_by_the_least_important_columns() {
        let table = || {
            let mut table = Table::new(&["name", ">ms", "words", "more"]);
            table.row(vec!["longer".into(), "100.0".into(), "x".into()]);
            table.row(vec!["a".into(), "1.0".into(), "some text".into(), "y".into()]);
            table
        };
        // 6 + 5 + 9 + 4 and three gaps.
        let (mut whole, mut cut) = (table(), table());
        assert_eq!(whole.narrow(30, &["words", "more", "ms"]), Vec::<String>::new());
        assert_eq!(cut.narrow(17, &["words", "more", "ms"]), ["ms", "more"]);
        assert_eq!(
            cut.render(Terminal::plain()),
            "name    words\nlonger  x\na       some text\n"
        );
        assert_eq!(cut.narrow(1, &["words"]), ["words"], "what is not named stays");
    }
}
