//! The text of one instruction: its modifiers, each of which has to be used, and its operands.

use crate::instruction::{Address, Compute, Op, Predicate, Source, Special, Target};
use crate::ptx::error::Refusal;
use crate::ptx::integers::number;
use crate::ptx::names::{Names, Register};
use crate::types::Type;

pub(super) struct Operands<'a> {
    names: &'a Names,
    opcode: &'a str,
    /// What nobody has taken yet.
    modifiers: Vec<&'a str>,
    operands: Vec<&'a str>,
    /// The labels that a branch goes to. Whoever decodes the body finds them.
    pub(super) labels: Vec<String>,
}

impl<'a> Operands<'a> {
    /// Without the guard.
    pub(super) fn new(names: &'a Names, text: &'a str) -> Self {
        let (mnemonic, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mut parts = mnemonic.split('.');
        let opcode = parts.next().unwrap_or("");
        Self {
            names,
            opcode,
            modifiers: parts.collect(),
            operands: split_list(rest),
            labels: Vec::new(),
        }
    }

    pub(super) fn opcode(&self) -> &'a str {
        self.opcode
    }

    pub(super) fn names(&self) -> &'a Names {
        self.names
    }

    pub(super) fn count(&self) -> usize {
        self.operands.len()
    }

    pub(super) fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    pub(super) fn take(&mut self, modifier: &str) -> bool {
        let found = self.modifiers.iter().position(|known| *known == modifier);
        if let Some(at) = found {
            self.modifiers.remove(at);
        }
        found.is_some()
    }

    /// Takes modifiers that do not change a result.
    pub(super) fn take_hints(&mut self, hints: &[&str]) {
        self.modifiers.retain(|modifier| !hints.contains(modifier));
    }

    /// Takes the first modifier that is in the table.
    pub(super) fn take_one<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let meaning = |modifier: &str| {
            table
                .iter()
                .find(|(name, _)| *name == modifier)
                .map(|(_, meaning)| *meaning)
        };
        let at = self.modifiers.iter().position(|modifier| meaning(modifier).is_some())?;
        meaning(self.modifiers.remove(at))
    }

    /// Takes the first modifier that is a type.
    pub(super) fn take_type(&mut self) -> Result<Type, Refusal> {
        let at = self
            .modifiers
            .iter()
            .position(|modifier| Type::named(modifier).is_some());
        let taken = at.map(|at| self.modifiers.remove(at));
        taken.and_then(Type::named).ok_or(Refusal::Missing("its type"))
    }

    /// Refuses modifiers that nobody has taken, and a wrong number of operands.
    pub(super) fn finish(&self, operands: usize) -> Result<(), Refusal> {
        if let Some(modifier) = self.modifiers.first() {
            return Err(Refusal::Modifier((*modifier).to_owned()));
        }
        if self.operands.len() != operands {
            return Err(Refusal::OperandCount {
                found: self.operands.len(),
                expected: operands,
            });
        }
        Ok(())
    }

    pub(super) fn text(&self, index: usize) -> Result<&'a str, Refusal> {
        let missing = Refusal::OperandCount {
            found: self.operands.len(),
            expected: index + 1,
        };
        self.operands.get(index).copied().ok_or(missing)
    }

    pub(super) fn register(&self, index: usize) -> Result<u32, Refusal> {
        Ok(self.named_register(self.text(index)?)?.index)
    }

    pub(super) fn target(&self, index: usize) -> Result<Target, Refusal> {
        let register = self.named_register(self.text(index)?)?;
        Ok(Target {
            register: register.index,
            ty: register.ty,
        })
    }

    pub(super) fn named_register(&self, name: &str) -> Result<Register, Refusal> {
        self.names
            .register(name)
            .ok_or_else(|| Refusal::Undeclared(name.to_owned()))
    }

    /// `a|b`: two results.
    pub(super) fn register_pair(&self, index: usize) -> Result<(u32, Option<u32>), Refusal> {
        let text = self.text(index)?;
        let (first, second) = match text.split_once('|') {
            Some((first, second)) => (first.trim(), Some(second.trim())),
            None => (text, None),
        };
        let second = second.map(|name| self.named_register(name)).transpose()?;
        Ok((self.named_register(first)?.index, second.map(|register| register.index)))
    }

    pub(super) fn source(&self, index: usize, ty: Type) -> Result<Source, Refusal> {
        self.named_source(self.text(index)?, ty)
    }

    pub(super) fn named_source(&self, text: &str, ty: Type) -> Result<Source, Refusal> {
        if let Some(register) = self.names.register(text) {
            return Ok(Source::Register(register.index));
        }
        if let Some(special) = Special::named(text) {
            return Ok(Source::Special(special));
        }
        let constant = match text.split_at_checked(2) {
            Some(("0f" | "0F", digits)) if ty.bytes() == 4 => u64::from_str_radix(digits, 16).ok(),
            Some(("0d" | "0D", digits)) if ty.bytes() == 8 => u64::from_str_radix(digits, 16).ok(),
            _ => number(text).map(|value| value as u64),
        };
        if let Some(constant) = constant {
            return Ok(Source::Constant(constant & ty.mask()));
        }
        let Address { base, offset } = self.variable_address(text)?;
        match base {
            Source::Constant(address) => Ok(Source::Constant(address.wrapping_add_signed(offset) & ty.mask())),
            _ => Err(Refusal::Operand(text.to_owned())),
        }
    }

    /// A predicate register, perhaps with `!`.
    pub(super) fn predicate(&self, index: usize) -> Result<Predicate, Refusal> {
        let text = self.text(index)?;
        let (name, is_negated) = text.strip_prefix('!').map_or((text, false), |name| (name.trim(), true));
        let register = self.named_register(name)?;
        if register.ty != Type::Pred {
            return Err(Refusal::Operand(text.to_owned()));
        }
        Ok(Predicate {
            from: Source::Register(register.index),
            is_negated,
        })
    }

    /// `{a, b}`, or one operand without braces.
    pub(super) fn list(&self, index: usize) -> Result<Vec<&'a str>, Refusal> {
        let text = self.text(index)?;
        let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
        Ok(inner.map_or_else(|| vec![text], split_list))
    }

    pub(super) fn register_list(&self, index: usize) -> Result<Vec<u32>, Refusal> {
        let names = self.list(index)?;
        names
            .into_iter()
            .map(|name| Ok(self.named_register(name)?.index))
            .collect()
    }

    pub(super) fn source_list(&self, index: usize, ty: Type) -> Result<Vec<Source>, Refusal> {
        let texts = self.list(index)?;
        texts.into_iter().map(|text| self.named_source(text, ty)).collect()
    }

    /// `[base+offset]`
    pub(super) fn address(&self, index: usize) -> Result<Address, Refusal> {
        let text = self.text(index)?;
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        self.variable_address(inner.ok_or_else(|| Refusal::Operand(text.to_owned()))?.trim())
    }

    /// A register, a variable or a number, perhaps with an offset.
    fn variable_address(&self, text: &str) -> Result<Address, Refusal> {
        let (base, offset) = match text.split_once('+') {
            Some((base, offset)) => (base.trim(), number(offset.trim())),
            None => (text, Some(0)),
        };
        let offset = offset.and_then(|offset| i64::try_from(offset).ok());
        let offset = offset.ok_or_else(|| Refusal::Operand(text.to_owned()))?;
        let base = if let Some(register) = self.names.register(base) {
            Source::Register(register.index)
        } else if let Some(address) = self.names.variables.get(base) {
            Source::Constant(*address)
        } else if let Some(address) = number(base) {
            Source::Constant(address as u64)
        } else {
            return Err(Refusal::Undeclared(base.to_owned()));
        };
        Ok(Address { base, offset })
    }

    /// An operation that puts a function of up to three operands into a register. It ends the instruction.
    pub(super) fn compute(&self, f: Compute, types: &[Type]) -> Result<Op, Refusal> {
        self.finish(types.len() + 1)?;
        let mut from = [Source::Constant(0); 3];
        for (index, (source, ty)) in from.iter_mut().zip(types).enumerate() {
            *source = self.source(index + 1, *ty)?;
        }
        Ok(Op::Compute {
            f,
            to: self.register(0)?,
            from,
        })
    }
}

/// Splits at the commas that are outside of brackets. No text is no operand.
fn split_list(text: &str) -> Vec<&str> {
    let text = text.trim();
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_i32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text.is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_split_outside_of_brackets_only() {
        assert_eq!(split_list(" {%r1, %r2}, [%rd1+8] , 3"), ["{%r1, %r2}", "[%rd1+8]", "3"]);
        assert!(split_list("  ").is_empty());
    }
}
