//! What names mean: registers by scope, variables by the address that they have in their space.

use std::collections::HashMap;

use crate::ptx::error::Refusal;
use crate::ptx::integers::number;
use crate::types::Type;

/// A range of registers (`%r<99>`) has at most this many. Beyond it the declaration is refused.
const REGISTERS_MAX: u32 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register {
    pub(super) index: u32,
    pub(super) ty: Type,
}

#[derive(Debug)]
struct Scope {
    id: u32,
    registers: HashMap<String, Register>,
}

/// The names of one kernel.
#[derive(Debug)]
pub(super) struct Names {
    scopes: Vec<Scope>,
    scopes_seen: u32,
    registers: u32,
    /// Addresses as `mov` gives them.
    pub(super) variables: HashMap<String, u64>,
    /// `.branchtargets`
    pub(super) label_lists: HashMap<String, Vec<String>>,
}

impl Names {
    /// Where results go that nobody wants.
    pub(super) const SINK: Register = Register {
        index: 0,
        ty: Type::B64,
    };
    /// The carry of `add.cc` and its like.
    pub(super) const CARRY: u32 = 1;

    pub(super) fn new(variables: HashMap<String, u64>) -> Self {
        let mut names = Self {
            scopes: Vec::new(),
            scopes_seen: 0,
            registers: 2,
            variables,
            label_lists: HashMap::new(),
        };
        names.open();
        names
    }

    pub(super) fn open(&mut self) {
        self.scopes.push(Scope {
            id: self.scopes_seen,
            registers: HashMap::new(),
        });
        self.scopes_seen += 1;
    }

    /// False if only the kernel's own scope is open.
    pub(super) fn close(&mut self) -> bool {
        self.scopes.len() > 1 && self.scopes.pop().is_some()
    }

    /// The open scopes, the innermost first.
    pub(super) fn scope_ids(&self) -> Vec<u32> {
        self.scopes.iter().rev().map(|scope| scope.id).collect()
    }

    pub(super) fn register_count(&self) -> usize {
        self.registers as usize
    }

    pub(super) fn register(&self, name: &str) -> Option<Register> {
        if name == "_" {
            return Some(Self::SINK);
        }
        self.scopes
            .iter()
            .rev()
            .find_map(|scope| scope.registers.get(name).copied())
    }

    /// `.reg .b32 %r<5>, x`
    pub(super) fn declare_registers(&mut self, directive: &str) -> Result<(), Refusal> {
        let declared = directive.trim_start_matches(".reg").trim_start();
        let (ty, names) = declared.split_once(char::is_whitespace).ok_or(Refusal::Directive)?;
        let ty = Type::named(ty.trim_start_matches('.')).ok_or(Refusal::Directive)?;
        for name in names.split(',').map(str::trim) {
            match name.split_once('<') {
                None => self.declare(name.to_owned(), ty)?,
                Some((base, count)) => {
                    let count = count.trim_end_matches('>').trim().parse::<u32>();
                    let count = count.map_err(|_| Refusal::Operand(name.to_owned()))?;
                    if count > REGISTERS_MAX {
                        return Err(Refusal::Operand(name.to_owned()));
                    }
                    for number in 0..count {
                        self.declare(format!("{base}{number}"), ty)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn declare(&mut self, name: String, ty: Type) -> Result<(), Refusal> {
        let register = Register {
            index: self.registers,
            ty,
        };
        let scope = self.scopes.last_mut().ok_or(Refusal::Directive)?;
        if name.is_empty() || self.registers >= REGISTERS_MAX {
            return Err(Refusal::Operand(name));
        }
        scope.registers.insert(name, register);
        self.registers += 1;
        Ok(())
    }
}

/// A declared variable: `.shared .align 16 .b8 name[4][8]`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Variable<'a> {
    pub(super) name: &'a str,
    pub(super) ty: Type,
    pub(super) align: usize,
    /// `None`: `[]`, whose size the launch decides.
    pub(super) bytes: Option<usize>,
    pub(super) initial: Option<&'a str>,
}

/// No variable is larger.
const VARIABLE_BYTES_MAX: usize = 1 << 30;

impl<'a> Variable<'a> {
    /// The text without its state space: `.align 4 .b8 name[4] = {1}`, `.u64 .ptr .global .align 16 name`. What is in
    /// `ignored` says nothing about the layout.
    pub(super) fn parse(text: &'a str, ignored: &[&str]) -> Result<Self, Refusal> {
        let (declared, initial) = match text.split_once('=') {
            Some((declared, initial)) => (declared.trim(), Some(initial.trim())),
            None => (text.trim(), None),
        };
        let bracket = declared.find('[').unwrap_or(declared.len());
        let (words, dimensions) = declared.split_at(bracket);
        let mut words: Vec<&str> = words.split_whitespace().collect();
        let name = words.pop().ok_or(Refusal::Directive)?;
        let (mut ty, mut align) = (None, None);
        let mut words = words.into_iter();
        let mut is_pointer = false;
        while let Some(word) = words.next() {
            match word {
                ".align" => {
                    let value = words.next().and_then(|value| value.parse::<usize>().ok());
                    let value = value
                        .filter(|value| value.is_power_of_two())
                        .ok_or(Refusal::Directive)?;
                    // After `.ptr` it is said of what the pointer points to.
                    align = if is_pointer { align } else { Some(value) };
                }
                ".ptr" => is_pointer = true,
                _ if ignored.contains(&word) => {}
                _ => ty = Some(Type::named(word.trim_start_matches('.')).ok_or(Refusal::Directive)?),
            }
        }
        let ty = ty.ok_or(Refusal::Directive)?;
        let bytes = array_bytes(ty.bytes(), dimensions)?;
        Ok(Self {
            name,
            ty,
            align: align.unwrap_or(ty.bytes()),
            bytes,
            initial,
        })
    }
}

/// `[4][8]` of elements. `None`: the first dimension is left open.
fn array_bytes(element_bytes: usize, dimensions: &str) -> Result<Option<usize>, Refusal> {
    let refused = || Refusal::Operand(dimensions.to_owned());
    let mut bytes = element_bytes;
    for dimension in dimensions
        .split(']')
        .map(str::trim)
        .filter(|dimension| !dimension.is_empty())
    {
        let count = dimension.strip_prefix('[').ok_or_else(refused)?.trim();
        if count.is_empty() {
            return Ok(None);
        }
        let count = number(count)
            .and_then(|count| usize::try_from(count).ok())
            .ok_or_else(refused)?;
        bytes = bytes
            .checked_mul(count)
            .filter(|bytes| *bytes <= VARIABLE_BYTES_MAX)
            .ok_or_else(refused)?;
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_register_hides_an_outer_one_until_its_scope_ends() {
        let mut names = Names::new(HashMap::new());
        names.declare_registers(".reg .b32 %r<3>, t").unwrap();
        let outer = names.register("t").unwrap();
        names.open();
        names.declare_registers(".reg .pred t").unwrap();
        assert_eq!(names.register("t").unwrap().ty, Type::Pred);
        assert!(names.close());
        assert_eq!(names.register("t"), Some(outer));
        assert!(!names.close());
        assert_eq!(names.register("%r3"), None);
    }

    #[test]
    fn the_alignment_of_a_pointers_target_is_not_the_parameters() {
        let ignored = [".global"];
        let variable = Variable::parse(".u64 .ptr .global .align 1 p", &ignored).unwrap();
        assert_eq!((variable.name, variable.align, variable.bytes), ("p", 8, Some(8)));
        let variable = Variable::parse(".align 16 .b8 s[4][6]", &[]).unwrap();
        assert_eq!((variable.name, variable.align, variable.bytes), ("s", 16, Some(24)));
        assert_eq!(Variable::parse(".align 16 .b8 s[]", &[]).unwrap().bytes, None);
        assert!(Variable::parse(".align 3 .b8 s[4]", &[]).is_err());
    }
}
