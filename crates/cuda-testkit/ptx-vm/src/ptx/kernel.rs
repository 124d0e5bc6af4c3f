//! A kernel as a launch needs it, and what its head says: name, parameters, sizes of blocks.

use std::sync::Arc;

use crate::instruction::Instruction;
use crate::ptx::error::Refusal;
use crate::ptx::integers::number;
use crate::ptx::names::Variable;

/// A parameter's place in the bytes that a launch hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    pub offset: usize,
    pub bytes: usize,
}

#[derive(Clone, Debug)]
pub struct Kernel {
    pub name: String,
    pub params: Vec<Param>,
    pub param_bytes: usize,
    /// `.maxntid` or `.reqntid`: a block with more threads is refused.
    pub max_threads: Option<u32>,
    pub static_shared_bytes: usize,
    /// Of each thread.
    pub local_bytes: usize,
    /// `.reqntid`: a block has exactly this shape.
    pub(crate) required_block: Option<[u32; 3]>,
    /// Where dynamic shared memory begins, if the launch has any.
    pub(crate) dynamic_shared_at: usize,
    pub(crate) registers: usize,
    /// The register of the carry.
    pub(crate) carry: u32,
    /// The last one ends the thread.
    pub(crate) code: Vec<Instruction>,
    /// The module's `.global` and `.const` variables.
    pub(crate) image: Arc<[u8]>,
    /// The first line of its body in the PTX.
    pub(crate) line: u32,
}

/// What stands in front of a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head<'a> {
    pub(super) name: &'a str,
    pub(super) params: Vec<Param>,
    /// By parameter.
    pub(super) param_names: Vec<&'a str>,
    pub(super) param_bytes: usize,
    pub(super) max_threads: Option<u32>,
    pub(super) required_block: Option<[u32; 3]>,
}

/// They say what a parameter points to, and nothing about its place.
const POINTER_WORDS: [&str; 5] = [".global", ".shared", ".const", ".local", ".param"];
/// Hints for `ptxas`, each followed by one number.
const HINTS: [&str; 3] = [".minnctapersm", ".maxnreg", ".maxnctapersm"];

impl<'a> Head<'a> {
    /// `.visible .entry name(.param .u64 p, ...) .maxntid 128, 1, 1`. `None`: a device function, which is not run.
    pub(super) fn parse(text: &'a str) -> Result<Option<Self>, Refusal> {
        let Some((before, after)) = text.split_once(".entry") else {
            return Ok(None);
        };
        if let Some(word) = before
            .split_whitespace()
            .find(|word| !matches!(*word, ".visible" | ".weak"))
        {
            return Err(Refusal::Modifier(word.trim_start_matches('.').to_owned()));
        }
        let (name, params, attributes) = match after.split_once('(') {
            Some((name, rest)) => {
                let (params, attributes) = rest.split_once(')').ok_or(Refusal::Unterminated)?;
                (name, params, attributes)
            }
            // Without parameters.
            None => {
                let end = after.trim_start().find(char::is_whitespace);
                let (name, attributes) = after.trim_start().split_at(end.unwrap_or(after.trim_start().len()));
                (name, "", attributes)
            }
        };
        let mut head = Self {
            name: name.trim(),
            params: Vec::new(),
            param_names: Vec::new(),
            param_bytes: 0,
            max_threads: None,
            required_block: None,
        };
        for param in params.split(',').map(str::trim).filter(|param| !param.is_empty()) {
            head.add_param(param)?;
        }
        head.read_attributes(attributes)?;
        Ok(Some(head))
    }

    fn add_param(&mut self, text: &'a str) -> Result<(), Refusal> {
        let declared = text.strip_prefix(".param").ok_or(Refusal::Directive)?;
        let variable = Variable::parse(declared, &POINTER_WORDS)?;
        let bytes = variable.bytes.ok_or(Refusal::Directive)?;
        let offset = self.param_bytes.next_multiple_of(variable.align);
        self.params.push(Param { offset, bytes });
        self.param_names.push(variable.name);
        self.param_bytes = offset + bytes;
        Ok(())
    }

    /// Each attribute begins with a dot, and numbers follow it.
    fn read_attributes(&mut self, attributes: &str) -> Result<(), Refusal> {
        for attribute in attributes.split('.').skip(1) {
            let attribute = attribute.trim();
            let (name, values) = attribute.split_once(char::is_whitespace).unwrap_or((attribute, ""));
            let values: Option<Vec<u32>> = values
                .split(',')
                .map(|value| number(value.trim()).and_then(|value| u32::try_from(value).ok()))
                .collect();
            let refused = || Refusal::Modifier(attribute.to_owned());
            let values = values
                .filter(|values| (1..=3).contains(&values.len()))
                .ok_or_else(refused)?;
            let dimension = |index: usize| values.get(index).copied().unwrap_or(1);
            let shape = [dimension(0), dimension(1), dimension(2)];
            let threads = shape.into_iter().try_fold(1_u32, u32::checked_mul);
            match name {
                "maxntid" => self.max_threads = Some(threads.ok_or_else(refused)?),
                "reqntid" => {
                    self.max_threads = Some(threads.ok_or_else(refused)?);
                    self.required_block = Some(shape);
                }
                _ if HINTS.iter().any(|hint| hint.trim_start_matches('.') == name) && values.len() == 1 => {}
                _ => return Err(refused()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_at_their_alignment() {
        let text = ".visible .entry k(\n.param .u64 .ptr .global .align 1 k_0,\n.param .u32 k_1,\n.param .u64 k_2,\n\
                    .param .align 8 .b8 k_3[24]\n)\n.maxntid 128, 2\n.minnctapersm 2";
        let head = Head::parse(text).unwrap().unwrap();
        let places: Vec<(usize, usize)> = head.params.iter().map(|param| (param.offset, param.bytes)).collect();
        assert_eq!(places, [(0, 8), (8, 4), (16, 8), (24, 24)]);
        assert_eq!((head.name, head.param_bytes, head.max_threads), ("k", 48, Some(256)));
        assert_eq!(head.param_names, ["k_0", "k_1", "k_2", "k_3"]);
    }

    #[test]
    fn an_attribute_that_is_not_known_is_refused() {
        let error = Head::parse(".entry k() .explicitcluster").unwrap_err();
        assert_eq!(error, Refusal::Modifier("explicitcluster".to_owned()));
    }
}
