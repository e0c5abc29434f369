"The checks at work: each mutation of a kernel's source is caught, but those that do no harm"
import pytest
import mutations

# numpy's, of overflows and NaN
pytestmark = [pytest.mark.usefixtures('interpreter'), pytest.mark.filterwarnings('ignore::RuntimeWarning')]

@pytest.mark.parametrize('i', range(len(mutations.MUTATIONS)), ids=lambda i: ': '.join(mutations.MUTATIONS[i][:2]))
def test_caught(i):
    module, _, old, new, harmless = mutations.MUTATIONS[i]
    found = mutations.caught(module, old, new)
    assert found or harmless, 'no check objects'
    assert not (found and harmless), found

@pytest.mark.parametrize('module', ['kv_write', 'paged_decode', 'paged_prefill', 'coded_matmul'])
def test_no_mutation_no_objection(module):
    for _, check in mutations.checks(module, mutations.text(module)): check()
