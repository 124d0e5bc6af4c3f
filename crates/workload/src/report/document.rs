//! What a report says, before it is HTML or Markdown: sections of tables, pictures and sentences.
//!
//! Everything here is plain text from any source. Only the two files of `render/` and `chart/svg.rs` make markup of it, and
//! they escape all of it.

/// One section of the report.
pub struct Section {
    /// The anchor of its heading.
    pub id: &'static str,
    pub title: &'static str,
    pub blocks: Vec<Block>,
}

pub enum Block {
    /// The name of a shape, or of what the next blocks share.
    Heading(String),
    Text(String),
    /// Why there is nothing here: one sentence.
    Empty(String),
    /// The one sentence that a reader takes along.
    Verdict(String),
    Summary(Vec<Card>),
    Legend(Vec<LegendItem>),
    /// Pictures that stand beside each other where there is room.
    Pictures(Vec<Picture>),
    Table(Table),
    /// A table with the figures of the pictures above it; the HTML shows it on demand.
    Figures(Table),
    /// A command, or other text that is to be copied as it is.
    Code(String),
    Definitions(Vec<(&'static str, &'static str)>),
}

/// One arm in the summary: exactly three numbers.
pub struct Card {
    pub name: String,
    pub arm: usize,
    pub note: String,
    pub numbers: [CardNumber; 3],
}

pub struct CardNumber {
    /// Who asks for it.
    pub reader: &'static str,
    pub what: &'static str,
    pub value: String,
    pub unit: &'static str,
    pub interval: String,
}

pub struct LegendItem {
    pub text: String,
    pub swatch: Swatch,
}

#[derive(Clone, Copy)]
pub enum Swatch {
    /// The arm with this index: a line with its marker.
    Arm(usize),
    Line(&'static str),
    Box(&'static str),
}

pub struct Picture {
    /// What it shows, with percentile, load and shape where it has them.
    pub caption: String,
    pub svg: String,
    /// A wide picture has a row of its own.
    pub is_wide: bool,
}

pub struct Table {
    pub caption: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
}

pub struct Column {
    pub name: String,
    pub is_number: bool,
}

/// The first cell names the row.
pub struct Row {
    pub cells: Vec<String>,
    pub tone: Tone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Good,
    Bad,
    /// Rejected, or not shown to matter.
    Faint,
    Chosen,
}

/// The finding of a verdict's sentence, and the figures behind its last colon.
pub fn verdict_parts(text: &str) -> (&str, &str) {
    text.split_at(text.rfind(": ").map_or(text.len(), |colon| colon + 1))
}

impl Table {
    /// `columns` are names; a name that begins with `#` is that of a column of numbers.
    pub fn new(caption: impl Into<String>, columns: &[&str]) -> Table {
        Table {
            caption: caption.into(),
            columns: columns
                .iter()
                .map(|name| Column {
                    name: name.trim_start_matches('#').to_owned(),
                    is_number: name.starts_with('#'),
                })
                .collect(),
            rows: Vec::new(),
        }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.toned(Tone::Plain, cells);
    }

    pub fn toned(&mut self, tone: Tone, cells: Vec<String>) {
        self.rows.push(Row { cells, tone });
    }
}

impl Section {
    pub fn new(id: &'static str, title: &'static str) -> Section {
        Section {
            id,
            title,
            blocks: Vec::new(),
        }
    }

    pub fn text(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Text(text.into()));
    }

    pub fn empty(&mut self, why: impl Into<String>) {
        self.blocks.push(Block::Empty(why.into()));
    }

    pub fn heading(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Heading(text.into()));
    }

    /// Adds the table, or the sentence when it has no row.
    pub fn table_or(&mut self, table: Table, why_empty: impl Into<String>) {
        if table.rows.is_empty() {
            self.empty(why_empty);
        } else {
            self.blocks.push(Block::Table(table));
        }
    }
}
