//! PTX text to statements with their lines. It knows where a statement ends, and not what it means.

use crate::ptx::error::{ParseError, Refusal};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Statement<'a> {
    /// Of the PTX, from 1.
    pub(super) line: u32,
    pub(super) form: Form<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form<'a> {
    Open,
    Close,
    Label(&'a str),
    /// Begins with a dot. Without its semicolon.
    Directive(&'a str),
    /// A function with its parameters, in front of its body.
    Head(&'a str),
    Instruction(&'a str),
}

impl Statement<'_> {
    pub(super) fn refuse(&self, refusal: Refusal) -> ParseError {
        let text = match self.form {
            Form::Open => "{",
            Form::Close => "}",
            Form::Label(text) | Form::Directive(text) | Form::Head(text) | Form::Instruction(text) => text,
        };
        let words: Vec<&str> = text.split_whitespace().take(STATEMENT_WORDS_MAX).collect();
        ParseError {
            line: self.line,
            statement: words.join(" "),
            refusal,
        }
    }
}

/// An error shows this many words of a statement, for an initial value can have thousands.
const STATEMENT_WORDS_MAX: usize = 24;

/// These directives end with their line and not with a semicolon.
const LINE_DIRECTIVES: [&str; 5] = [".version", ".target", ".address_size", ".file", ".loc"];

/// Comments become spaces; lines stay where they are. Text in quotes is kept.
pub(super) fn without_comments(ptx: &str) -> String {
    let mut clean = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(first) = rest.chars().next() {
        let taken = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |at| at + 2);
            clean.push(' ');
            clean.extend(rest[..end].chars().filter(|c| *c == '\n'));
            end
        } else if first == '"' {
            let end = rest[1..].find('"').map_or(rest.len(), |at| at + 2);
            clean.push_str(&rest[..end]);
            end
        } else {
            clean.push(first);
            first.len_utf8()
        };
        rest = &rest[taken..];
    }
    clean
}

/// All statements of a text without comments.
pub(super) fn statements(text: &str) -> Result<Vec<Statement<'_>>, ParseError> {
    let mut reader = Reader { rest: text, line: 1 };
    let mut all = Vec::new();
    while let Some(statement) = reader.next_statement()? {
        all.push(statement);
    }
    Ok(all)
}

struct Reader<'a> {
    rest: &'a str,
    line: u32,
}

impl<'a> Reader<'a> {
    fn next_statement(&mut self) -> Result<Option<Statement<'a>>, ParseError> {
        loop {
            self.skip_blank();
            let line = self.line;
            let Some(first) = self.rest.chars().next() else {
                return Ok(None);
            };
            let form = match first {
                '{' => {
                    self.take(1);
                    Form::Open
                }
                '}' => {
                    self.take(1);
                    Form::Close
                }
                '.' if self.rest.starts_with(".section") => {
                    self.skip_section()?;
                    continue;
                }
                '.' => self.directive()?,
                _ => match self.label() {
                    Some(label) => label,
                    None => Form::Instruction(self.take_to_semicolon()?),
                },
            };
            return Ok(Some(Statement { line, form }));
        }
    }

    /// Takes bytes and counts their lines.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.matches('\n').count() as u32;
        self.rest = rest;
        taken
    }

    fn skip_blank(&mut self) {
        let is_blank = |c: char| c.is_whitespace() || c == ';';
        let blank = self.rest.find(|c: char| !is_blank(c)).unwrap_or(self.rest.len());
        self.take(blank);
    }

    fn unterminated(&self) -> ParseError {
        let line = self.rest.lines().next().unwrap_or("");
        let statement = Statement {
            line: self.line,
            form: Form::Instruction(line),
        };
        statement.refuse(Refusal::Unterminated)
    }

    fn take_to_semicolon(&mut self) -> Result<&'a str, ParseError> {
        let end = self.rest.find(';').ok_or_else(|| self.unterminated())?;
        let taken = self.take(end);
        Ok(taken.trim())
    }

    /// `name:`, but not `name::`.
    fn label(&mut self) -> Option<Form<'a>> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%');
        let rest = self.rest;
        let end = rest.find(|c: char| !is_name(c))?;
        let after = rest[end..].trim_start();
        if end == 0 || !after.starts_with(':') || after.starts_with("::") {
            return None;
        }
        self.take(rest.len() - after.len() + 1);
        Some(Form::Label(&rest[..end]))
    }

    /// Debug information has nothing for a run: what it says of lines is in `.loc`.
    fn skip_section(&mut self) -> Result<(), ParseError> {
        let open = self.rest.find('{').ok_or_else(|| self.unterminated())?;
        let mut depth = 0_usize;
        for (at, c) in self.rest[open..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                self.take(open + at + 1);
                return Ok(());
            }
        }
        Err(self.unterminated())
    }

    fn directive(&mut self) -> Result<Form<'a>, ParseError> {
        let rest = self.rest;
        let word = rest.split_whitespace().next().unwrap_or("");
        if LINE_DIRECTIVES.contains(&word) {
            let end = rest.find('\n').unwrap_or(rest.len());
            return Ok(Form::Directive(self.take(end).trim()));
        }
        let end = rest.find(['{', ';']).ok_or_else(|| self.unterminated())?;
        let is_function = rest[..end]
            .split_whitespace()
            .any(|word| matches!(word, ".entry" | ".func"));
        if is_function && rest[end..].starts_with('{') {
            return Ok(Form::Head(self.take(end).trim()));
        }
        Ok(Form::Directive(self.take_to_semicolon()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forms(text: &str) -> Vec<(u32, String)> {
        let clean = without_comments(text);
        let all = statements(&clean).unwrap();
        all.iter().map(|s| (s.line, format!("{:?}", s.form))).collect()
    }

    #[test]
    fn statements_have_the_lines_of_the_text() {
        let text = ".version 9.0 // of PTX;\n/* two\nlines */ .file 1 \"a//b.cu\"\n.entry k(\n)\n{\n$L1: ret;\n}";
        let found = forms(text);
        let expected = [
            (1, "Directive(\".version 9.0\")"),
            (3, "Directive(\".file 1 \\\"a//b.cu\\\"\")"),
            (4, "Head(\".entry k(\\n)\")"),
            (6, "Open"),
            (7, "Label(\"$L1\")"),
            (7, "Instruction(\"ret\")"),
            (8, "Close"),
        ];
        assert_eq!(found, expected.map(|(line, form)| (line, form.to_owned())));
    }

    #[test]
    fn debug_sections_are_skipped_and_modifiers_are_no_labels() {
        let text = ".section .debug_str {\n.b8 1;\n}\nld.global.L1::no_allocate.b32 %r1, [%rd1];";
        assert_eq!(
            forms(text),
            [(
                4,
                "Instruction(\"ld.global.L1::no_allocate.b32 %r1, [%rd1]\")".to_owned()
            )]
        );
    }

    #[test]
    fn a_missing_semicolon_is_an_error_with_its_line() {
        let error = statements("ret;\n\nmov.u32 %r1, 1").unwrap_err();
        assert_eq!((error.line, error.refusal), (3, Refusal::Unterminated));
    }
}
